"""Notifications and lists over HTTP."""
