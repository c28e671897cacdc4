"""The console: a web page that shows each change, the clients that were told of it, and the clients that fetched it."""
