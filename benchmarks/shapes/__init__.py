"""Systems of the classic benchmarks, with the hub's configurations and weights made here: see ``__main__``."""
