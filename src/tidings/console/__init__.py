"""The console: a page that shows which changes there were, which clients were told of them, and which fetched them."""
