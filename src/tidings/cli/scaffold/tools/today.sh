#!/bin/sh
# Any executable file is a tool, in any language. The comment says what clients see of it.
# @describe Today's date
# @arg format:string As `date` takes it, for example %A %d %B %Y

exec date "+${TIDINGS_ARG_FORMAT:-%Y-%m-%d}"
