#!/bin/sh
# Registers items that have no file. The server runs it every few seconds if it is executable:
# chmod +x server.d/register.sh
# The items that it registers replace all others of their kind; these prompts replace those in prompts/.
cat <<'JSON'
{"prompts": [{"name": "review", "path": "review.md", "description": "Review a change, as registered"}]}
JSON
