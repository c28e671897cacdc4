#!/bin/sh
# Registers items that no file stands for. It is run every few seconds once it may be: chmod +x server.d/register.sh
# A kind that is registered here is served from here alone, so this one takes the place of prompts/.
cat <<'JSON'
{"prompts": [{"name": "review", "path": "review.md", "description": "Review a change, as registered"}]}
JSON
