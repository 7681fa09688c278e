"""In which numbers the calls of set-up models compute: kernels ask here, and a race of algorithms chooses within it."""
