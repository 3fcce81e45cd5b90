"""One adapter for each engine in the race, each a program of its own: see ``protocol``. ``peers.py`` starts them."""
