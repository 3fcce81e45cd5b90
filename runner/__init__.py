"""What a person talks to: the command line, the job, its journal, scheduling, placement and reports."""
