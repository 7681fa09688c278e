"""The options: declarations, checks, environment variables, and tables of precisions and operators."""
