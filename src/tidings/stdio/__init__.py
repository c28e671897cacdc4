"""Notifications and lists over stdio."""
