"""What a user sees of a job: live display, status, summary, report.html, traces; and the statistics behind them."""
