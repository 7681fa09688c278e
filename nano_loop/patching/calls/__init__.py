"""Interceptors of calls: into models, into exports, and into backwards."""
