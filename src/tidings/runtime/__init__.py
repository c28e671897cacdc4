"""Processes and time: child processes, lines on pipes, delays between attempts, and the end of this process."""
