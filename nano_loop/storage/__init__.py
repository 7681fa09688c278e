"""Folders and files that outlive a run and that no other user can change."""
