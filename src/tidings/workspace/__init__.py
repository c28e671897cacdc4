"""A folder is a live server: scripts, functions, files and prompts, as they stand on the disk."""
