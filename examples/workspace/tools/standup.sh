#!/bin/sh
# @describe What is on the board, in a sentence

tasks=$(wc -l < resources/sprint.md)
echo "$((tasks)) to do: $(sed 's/^- //' resources/sprint.md | tr '\n' ';')"
