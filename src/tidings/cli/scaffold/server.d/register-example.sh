#!/bin/sh
# Registers items while the server runs, for example those of another service.
# It is off. To turn it on, copy it to register.sh: the server runs that file every few seconds.
# If it registers tools, prompts or resources, no others of that kind are served. URI templates replace nothing.
cat <<'JSON'
{"resourceTemplates": [{"name": "drafts", "uriTemplate": "drafts://{name}", "path": "resources/drafts/{name}.md"}]}
JSON
