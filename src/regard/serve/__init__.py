"""The HTTP server: processes that hold the runs, a queue that batches what many clients ask, and the web page."""
