"""The HTTP server: worker processes that hold the runs, a queue that batches concurrent requests, and the web page."""
