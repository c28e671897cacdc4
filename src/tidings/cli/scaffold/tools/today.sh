#!/bin/sh
# Every executable file is a tool, in any language. These comments are its description for clients.
# @describe Today's date
# @arg format:string A format for `date`, for example %A %d %B %Y

exec date "+${TIDINGS_ARG_FORMAT:-%Y-%m-%d}"
