"""Interceptors of calls into models, exports and backwards."""
