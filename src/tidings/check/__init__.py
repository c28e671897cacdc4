"""Checks of the live behaviour of any MCP server, for `tidings check`.

The rules are in `rules.py`, with the clause of the specification that each belongs to. The checks read and write the
protocol themselves, so that a client library hides nothing of what the server sends.
"""
