# shellcheck shell=bash
# Functions for server.d/register.sh. The server runs: source register-sdk.sh; source register.sh
#
# This is Tidings' own implementation of the functions that the documentation of mcp-bash-framework describes. Each
# register function takes the JSON of one item. At the exit of the script, all of them are printed as one registration.

declare -A _mcp_registered=()

_mcp_define_kind() { # NAME MEMBER: define the functions of one kind of item
	eval "
	mcp_$1_manual_begin() { unset '_mcp_registered[$2]'; }
	mcp_$1_register_manual() { _mcp_registered[$2]+=\"\${_mcp_registered[$2]:+,}\$1\"; }
	mcp_$1_manual_finalize() { :; }
	mcp_$1_manual_abort() { mcp_$1_manual_begin; }
	"
}

_mcp_define_kind tools tools
_mcp_define_kind resources resources
_mcp_define_kind resources_templates resourceTemplates
_mcp_define_kind prompts prompts
_mcp_define_kind completion completions

mcp_register_tool() { mcp_tools_register_manual "$1"; }
mcp_register_resource() { mcp_resources_register_manual "$1"; }
mcp_register_prompt() { mcp_prompts_register_manual "$1"; }

_mcp_print_registered() {
	local kind separator=""
	((${#_mcp_registered[@]})) || return 0
	printf '{'
	for kind in "${!_mcp_registered[@]}"; do
		printf '%s"%s":[%s]' "${separator}" "${kind}" "${_mcp_registered[${kind}]}"
		separator=","
	done
	printf '}\n'
}

trap '_mcp_print_registered' EXIT
