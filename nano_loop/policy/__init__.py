"""In which numbers the calls of set-up models compute: kernels ask here, and nothing else decides it."""
