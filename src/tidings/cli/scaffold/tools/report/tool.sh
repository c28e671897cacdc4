#!/usr/bin/env bash
# A JSON object on standard output is the structured result. Each line on the progress channel is a progress notification.
set -euo pipefail
cd "$TIDINGS_WORKSPACE/resources"

echo "1/2 counting files" >&"$TIDINGS_PROGRESS_FD"
files=$(find . -type f | wc -l)
echo "2/2 counting bytes" >&"$TIDINGS_PROGRESS_FD"
bytes=$(find . -type f -exec cat {} + | wc -c)
printf '{"files": %d, "bytes": %d}\n' "$files" "$bytes"
