"""How the ranks of a run come together; `nano_loop.distributed.launch.launcher.Launcher` defines the interface."""
