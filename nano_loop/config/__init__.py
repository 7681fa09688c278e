"""Every option: its declaration, its checks, the environment, and tables of precisions and operators."""
