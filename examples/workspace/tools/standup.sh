#!/bin/sh
# @describe Summarize the board in one sentence

tasks=$(wc -l < resources/sprint.md)
echo "$((tasks)) to do: $(sed 's/^- //' resources/sprint.md | tr '\n' ';')"
