"""Adapters that give the tools of a mirror to an agent framework, one module per framework.

Each needs its own extra, and imports its framework at once. The owner of the mirror opens and closes it, so that
several agents and runs can share one connection.
"""
