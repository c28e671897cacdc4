# shellcheck shell=bash
# Helper functions for tools written in bash (4.4 or newer): source "${MCP_SDK:?}/tool-sdk.sh"
#
# This is Tidings' own implementation of the functions that the documentation of mcp-bash-framework describes.
# docs/tools.md lists them. Simple functions use only bash, and others values.py. jq applies filters if it is installed.
#
# mcp_fail*, mcp_error and mcp_result_* end the tool, because a tool that goes on after an error would act on rejected
# arguments. EXIT traps run. mcp_emit_* do not end the tool.

_MCP_SDK_DIR="${BASH_SOURCE[0]%/*}"
[[ ${_MCP_SDK_DIR} == /* ]] || _MCP_SDK_DIR="$(cd -- "${_MCP_SDK_DIR}" && pwd)"
_MCP_JQ="${MCPBASH_JSON_TOOL_BIN-$(command -v jq || true)}"
_MCP_FD="${TIDINGS_PROGRESS_FD:-}"
if [[ -n ${_MCP_FD} && -z ${MCP_PROGRESS_STREAM:-} ]]; then
	export MCP_PROGRESS_STREAM="/dev/fd/${_MCP_FD}"
fi

# _mcp_values OPERATION ARGS…: run values.py. Without site-packages it starts in 10 ms.
_mcp_values() {
	"${TIDINGS_PYTHON:-python3}" -I -S "${_MCP_SDK_DIR}/values.py" "$@"
}

# JSON text ----------------------------------------------------------------------------------------------------------

# Put the JSON string literal of $1 into the variable _mcp_quoted; start a process only if it is long.
_mcp_quote() {
	local LC_ALL=C value="$1" code char escape # by bytes: UTF-8 is not escaped
	if ((${#value} > 16384)); then # bash takes quadratic time
		_mcp_quoted="$(printf '%s' "${value}" | _mcp_values quote)"
		return
	fi
	value="${value//\\/\\\\}"
	value="${value//\"/\\\"}"
	if [[ ${value} == *[$'\x01'-$'\x1f']* ]]; then
		value="${value//$'\n'/\\n}"
		value="${value//$'\r'/\\r}"
		value="${value//$'\t'/\\t}"
		if [[ ${value} == *[$'\x01'-$'\x1f']* ]]; then
			for ((code = 1; code < 32; code++)); do
				printf -v escape '\\x%02x' "${code}"
				printf -v char '%b' "${escape}"
				printf -v escape '\\u%04x' "${code}"
				value="${value//"${char}"/"${escape}"}"
			done
		fi
	fi
	_mcp_quoted="\"${value}\""
}

mcp_json_escape() {
	local _mcp_quoted
	_mcp_quote "${1-}"
	printf '%s\n' "${_mcp_quoted}"
}

# mcp_json_obj KEY VALUE …: every value becomes a string.
mcp_json_obj() {
	if (($# % 2)); then
		mcp_fail -32603 "mcp_json_obj needs a value for every key; it got $# arguments"
	fi
	local _mcp_quoted out="" separator=""
	while (($#)); do
		_mcp_quote "$1"
		out+="${separator}${_mcp_quoted}"
		_mcp_quote "$2"
		out+=":${_mcp_quoted}"
		separator=","
		shift 2
	done
	printf '{%s}\n' "${out}"
}

mcp_json_arr() {
	local _mcp_quoted out="" separator="" value
	for value in "$@"; do
		_mcp_quote "${value}"
		out+="${separator}${_mcp_quoted}"
		separator=","
	done
	printf '[%s]\n' "${out}"
}

# Bash parses flat objects itself, as most arguments are: jq 1.6 takes 20 ms to start.
_MCP_STRING='"([^"\\[:cntrl:]]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_MCP_SCALAR="(${_MCP_STRING}|-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null)"
_MCP_MEMBER="[[:space:]]*(${_MCP_STRING})[[:space:]]*:[[:space:]]*${_MCP_SCALAR}[[:space:]]*"
_MCP_FLAT="^[[:space:]]*\\{([[:space:]]*|${_MCP_MEMBER}(,${_MCP_MEMBER})*)\\}[[:space:]]*\$"

_mcp_is_flat() {
	local LC_ALL=C
	((${#1} <= 4096)) && [[ $1 =~ ${_MCP_FLAT} ]]
}

# _mcp_get_flat JSON KEY: put the value at KEY of a flat object into _mcp_flat_value, as JSON. Fail if it is not flat.
_mcp_get_flat() {
	local LC_ALL=C rest="$1"
	_mcp_is_flat "${rest}" || return 1
	_mcp_flat_value=null
	rest="${rest#*\{}"
	while [[ ${rest} =~ ^${_MCP_MEMBER},? ]]; do
		rest="${rest:${#BASH_REMATCH[0]}}"
		if [[ ${BASH_REMATCH[1]} == "\"$2\"" ]]; then
			_mcp_flat_value="${BASH_REMATCH[4]}"
		fi
	done
}

# _mcp_unquote JSON: put the text of a scalar into _mcp_value. Fail if it has an escape that bash can't decode.
_mcp_unquote() {
	_mcp_value="$1"
	[[ ${_mcp_value} == '"'* ]] || return 0
	_mcp_value="${_mcp_value:1:${#_mcp_value}-2}"
	if [[ ${_mcp_value} == *\\* ]]; then
		[[ ${_mcp_value} != *\\[u/]* ]] || return 1
		_mcp_value="${_mcp_value//\\\"/\"}" # %b does not support it
		printf -v _mcp_value '%b' "${_mcp_value}"
	fi
}

mcp_is_valid_json() {
	_mcp_is_flat "${1-}" || _mcp_values valid <<<"${1-}"
}

# Put $1 into the variable _mcp_quoted: unchanged if it is JSON, else as a string literal.
_mcp_quote_unless_json() {
	if mcp_is_valid_json "$1"; then
		_mcp_quoted="$1"
	else
		_mcp_quote "$1"
	fi
}

mcp_byte_length() {
	local LC_ALL=C value="${1-}"
	printf '%s\n' "${#value}"
}

# mcp_json_truncate JSON [MAX_BYTES] [--array-path .a.b]
mcp_json_truncate() {
	local json="${1-}" max_bytes=102400 path=""
	shift || true
	if (($#)) && [[ $1 != --* ]]; then
		[[ $1 =~ ^[0-9]+$ ]] && max_bytes="$1"
		shift
	fi
	[[ ${1-} == --array-path ]] && path="${2-}"
	_mcp_values truncate "${max_bytes}" "${path}" <<<"${json}"
}

# mcp_extract_cli_error STDOUT STDERR [EXIT_STATUS]: print the error message of a program.
mcp_extract_cli_error() {
	local message
	message="$(_mcp_values cli-error <<<"${1-}")" || message=""
	if [[ -z ${message} ]]; then
		message="${2-}"
	fi
	printf '%s\n' "${message:-the command failed${3:+ with exit status $3}}"
}

# _mcp_get FILTER [mark]: apply a jq filter to standard input, and print strings without quotes. With `mark`, print the
# value between two marks, because $(…) drops line ends at the end, and nothing for null.
_mcp_get() {
	local filter="$1" status=0
	if [[ -z ${_MCP_JQ} ]]; then
		_mcp_values get "$@" || status=$?
		((status != 3)) || mcp_fail "the filter ${filter} needs jq: install jq or gojq"
		return "${status}"
	fi
	[[ -z ${2-} ]] || filter="(${filter}) | if . == null then empty else \"=\" + tostring + \"=\" end"
	"${_MCP_JQ}" -r "${filter}"
}

# _mcp_find FILTER COMMAND…: put the value in the JSON that the command prints into _mcp_value. Fail if there is none.
_mcp_find() {
	local filter="$1"
	shift
	_mcp_value="$("$@" | _mcp_get "${filter}" mark)" || {
		(($? != 1)) || exit 1 # the status of mcp_fail
		_mcp_value=""
	}
	[[ ${_mcp_value} == =*= ]] || return 1
	_mcp_value="${_mcp_value#=}"
	_mcp_value="${_mcp_value%=}"
}

# Arguments ----------------------------------------------------------------------------------------------------------

# _mcp_print_json JSON FILE: print the JSON, or else the content of the file.
_mcp_print_json() {
	if [[ -n $1 ]]; then
		printf '%s\n' "$1"
	elif [[ -r $2 ]]; then
		cat -- "$2"
	else
		printf '{}\n'
	fi
}

mcp_args_raw() { _mcp_print_json "${MCP_TOOL_ARGS_JSON:-}" "${MCP_TOOL_ARGS_FILE:-}"; }

# `.key`, or `.key // default`
_MCP_SIMPLE='^\.([A-Za-z_][A-Za-z0-9_]*)[[:space:]]*(//[[:space:]]*(empty|"[^"\\]*"|[0-9]+|true|false|null))?[[:space:]]*$'

# Apply a filter to the arguments.
_mcp_filter_args() {
	local _mcp_flat_value _mcp_value other
	if [[ $1 =~ ${_MCP_SIMPLE} ]]; then
		other="${BASH_REMATCH[3]}"
		if _mcp_get_flat "${MCP_TOOL_ARGS_JSON:-x}" "${BASH_REMATCH[1]}"; then
			if [[ -n ${other} && ${_mcp_flat_value} =~ ^(null|false)$ ]]; then
				[[ ${other} != empty ]] || return 0
				_mcp_flat_value="${other}"
			fi
			if _mcp_unquote "${_mcp_flat_value}"; then
				printf '%s\n' "${_mcp_value}"
				return
			fi
		fi
	fi
	mcp_args_raw | _mcp_get "$1"
}

# mcp_args_get FILTER [--default VALUE]
mcp_args_get() {
	local _mcp_value
	if [[ ${2-} != --default ]]; then
		_mcp_filter_args "${1:-.}"
	elif _mcp_find_arg "$1"; then
		printf '%s\n' "${_mcp_value}"
	else
		printf '%s\n' "${3-}"
	fi
}

# The _meta of the request.
mcp_meta_raw() { _mcp_print_json "${MCP_TOOL_META_JSON:-}" "${MCP_TOOL_META_FILE:-}"; }
mcp_meta_get() { MCP_TOOL_ARGS_JSON="${MCP_TOOL_META_JSON:-}" MCP_TOOL_ARGS_FILE="${MCP_TOOL_META_FILE:-}" mcp_args_get "$@"; }

# Put the argument at $1 into _mcp_value. Fail if it is missing or null; `false` and "" are values.
_mcp_find_arg() {
	local _mcp_flat_value
	if [[ $1 =~ ^\.([A-Za-z_][A-Za-z0-9_]*)$ ]] && _mcp_get_flat "${MCP_TOOL_ARGS_JSON:-x}" "${BASH_REMATCH[1]}"; then
		[[ ${_mcp_flat_value} != null ]] || return 1
		_mcp_unquote "${_mcp_flat_value}" && return
	fi
	_mcp_find "$1" mcp_args_raw
}

mcp_args_require() {
	local _mcp_value
	_mcp_find_arg "$1" || mcp_fail_invalid_args "${2:-$1 is required}"
	printf '%s\n' "${_mcp_value}"
}

# mcp_args_bool POINTER [--default true|false]
mcp_args_bool() {
	local pointer="$1" _mcp_value
	if ! _mcp_find_arg "${pointer}"; then
		[[ ${2-} == --default ]] || mcp_fail_invalid_args "${pointer} is required"
		_mcp_value="${3-}"
	fi
	case "${_mcp_value}" in
	true | 1) printf 'true\n' ;;
	*) printf 'false\n' ;;
	esac
}

# mcp_args_int POINTER [--default N] [--min N] [--max N]
mcp_args_int() {
	local pointer="$1" _mcp_value default="" min="" max=""
	shift
	while (($#)); do
		case "$1" in
		--default) default="${2-}" ;;
		--min) min="${2-}" ;;
		--max) max="${2-}" ;;
		*) mcp_fail -32603 "mcp_args_int has no option $1" ;;
		esac
		shift "$(($# > 1 ? 2 : 1))"
	done
	if ! _mcp_find_arg "${pointer}"; then
		[[ -n ${default} ]] || mcp_fail_invalid_args "${pointer} is required"
		printf '%s\n' "${default}"
		return
	fi
	if [[ ! ${_mcp_value} =~ ^(-?)0*([0-9]{1,18})(\.0+)?$ ]]; then
		mcp_fail_invalid_args "${pointer} must be an integer"
	fi
	_mcp_value="${BASH_REMATCH[1]}${BASH_REMATCH[2]}"
	if [[ -n ${min} ]] && ((_mcp_value < min)); then
		mcp_fail_invalid_args "${pointer} must be at least ${min}"
	fi
	if [[ -n ${max} ]] && ((_mcp_value > max)); then
		mcp_fail_invalid_args "${pointer} must be at most ${max}"
	fi
	printf '%s\n' "${_mcp_value}"
}

# Results ------------------------------------------------------------------------------------------------------------

mcp_emit_text() {
	printf '%s\n' "${1-}"
}

mcp_emit_json() {
	if [[ -n ${_MCP_JQ} ]] && ! _mcp_is_flat "${1-}"; then
		"${_MCP_JQ}" -c . <<<"${1-}" 2>/dev/null || printf '%s\n' "${1-}"
	else
		printf '%s\n' "${1-}"
	fi
}

# Print a result: $1 is success or error, $2 the JSON. Text that is not JSON becomes a string.
_mcp_result() {
	local max_bytes="${MCPBASH_MAX_TEXT_BYTES:-102400}" _mcp_quoted body
	if [[ $1 == success ]] && ((max_bytes > 8192)) && _mcp_is_flat "$2"; then
		body="{\"success\":true,\"result\":$2}"
		_mcp_quote "${body}"
		printf '{"content":[{"type":"text","text":%s}],"structuredContent":%s,"isError":false}\n' \
			"${_mcp_quoted}" "${body}"
		return
	fi
	_mcp_values "$1" "${max_bytes}" <<<"$2"
}

mcp_result_success() {
	_mcp_result success "${1:-null}"
	exit 0
}

# The exit status is 0, because the output is a valid result.
mcp_result_error() {
	_mcp_result error "${1:-null}"
	exit 0
}

mcp_result_text() {
	local _mcp_quoted
	_mcp_quote "${1-}"
	printf '{"content":[{"type":"text","text":%s}],"isError":false}\n' "${_mcp_quoted}"
	exit 0
}

# mcp_result_text_with_resource TEXT_OR_JSON (--path FILE [--mime TYPE] [--uri URI])…
mcp_result_text_with_resource() {
	local data="${1-}" path="" mime="" uri="" listing=""
	shift || true
	while (($#)); do
		case "$1" in
		--path)
			[[ -n ${path} ]] && listing+="${path}"$'\t'"${mime}"$'\t'"${uri}"$'\n'
			path="${2-}" mime="" uri=""
			;;
		--mime) mime="${2-}" ;;
		--uri) uri="${2-}" ;;
		*) mcp_fail -32603 "mcp_result_text_with_resource has no option $1" ;;
		esac
		shift "$(($# > 1 ? 2 : 1))"
	done
	[[ -n ${path} ]] && listing+="${path}"$'\t'"${mime}"$'\t'"${uri}"$'\n'
	if [[ -n ${MCP_TOOL_RESOURCES_FILE:-} ]]; then
		printf '%s' "${listing}" >"${MCP_TOOL_RESOURCES_FILE}"
	elif [[ -n ${listing} ]]; then
		mcp_log_warn tool-sdk "MCP_TOOL_RESOURCES_FILE is not set; the files are not embedded"
	fi
	mcp_result_success "${data}"
}

# mcp_error TYPE MESSAGE [--hint TEXT] [--data JSON]
mcp_error() {
	local _mcp_quoted out kind="${1:-internal_error}" message="${2:-failed}"
	shift "$(($# > 1 ? 2 : $#))"
	_mcp_quote "${kind}"
	out="{\"type\":${_mcp_quoted}"
	_mcp_quote "${message}"
	out+=",\"message\":${_mcp_quoted}"
	while (($#)); do
		case "$1" in
		--hint)
			_mcp_quote "${2-}"
			out+=",\"hint\":${_mcp_quoted}"
			;;
		--data)
			_mcp_quote_unless_json "${2-}"
			out+=",\"data\":${_mcp_quoted}"
			;;
		esac
		shift "$(($# > 1 ? 2 : 1))"
	done
	mcp_result_error "${out}}"
}

# mcp_fail [CODE] MESSAGE [DATA_JSON]: fail with a protocol error. It is written to a file, so that it works inside $(…).
mcp_fail() {
	local code=-32603 message data="" _mcp_quoted
	if [[ ${1-} =~ ^-?[0-9]+$ ]]; then
		code="$1"
		shift
	fi
	message="${1:-Internal error}"
	if [[ -n ${2-} ]]; then
		_mcp_quote_unless_json "$2"
		data=",\"data\":${_mcp_quoted}"
	fi
	_mcp_quote "${message}"
	if [[ -n ${MCP_TOOL_ERROR_FILE:-} ]]; then
		printf '{"code":%s,"message":%s%s}\n' "${code}" "${_mcp_quoted}" "${data}" >"${MCP_TOOL_ERROR_FILE}"
	fi
	printf '%s\n' "${message}" >&2
	exit 1
}

mcp_fail_invalid_args() {
	mcp_fail -32602 "${1:-Invalid arguments}" "${2-}"
}

# Progress, log, cancellation ----------------------------------------------------------------------------------------

_mcp_send_line() {
	if [[ -n ${_MCP_FD} ]]; then
		printf '%s\n' "$1" >&"${_MCP_FD}" || true
	fi 2>/dev/null
}

# mcp_progress PERCENT MESSAGE [TOTAL]
mcp_progress() {
	local amount="${1-}" total=100 _mcp_quoted
	[[ ${amount} =~ ^[0-9]+(\.[0-9]+)?$ ]] || amount=0
	if [[ ${3-} =~ ^[0-9]+$ ]]; then
		total="$3"
	elif ((10#${amount%%.*} > 100)); then
		amount=100
	fi
	_mcp_quote "${2-}"
	_mcp_send_line "{\"progress\":${amount},\"total\":${total},\"message\":${_mcp_quoted}}"
}

# mcp_log LEVEL LOGGER MESSAGE_OR_JSON
mcp_log() {
	local _mcp_quoted out
	_mcp_quote "${1:-info}"
	out="{\"level\":${_mcp_quoted}"
	_mcp_quote "${2:-tool}"
	out+=",\"logger\":${_mcp_quoted}"
	_mcp_quote "${3-}"
	_mcp_send_line "${out},\"data\":${_mcp_quoted}}"
}

mcp_log_debug() { mcp_log debug "$@"; }
mcp_log_info() { mcp_log info "$@"; }
mcp_log_notice() { mcp_log notice "$@"; }
mcp_log_warn() { mcp_log warning "$@"; }
mcp_log_warning() { mcp_log warning "$@"; }
mcp_log_error() { mcp_log error "$@"; }

mcp_debug() {
	if [[ -n ${MCPBASH_DEBUG_LOG:-} ]]; then
		printf '%s\n' "$*" >>"${MCPBASH_DEBUG_LOG}" || true
	else
		mcp_log debug tool "$*"
	fi
}

# Succeed if the call was cancelled. The process group also gets SIGTERM, so this is for use in a trap.
mcp_is_cancelled() {
	[[ -n ${MCP_CANCEL_FILE:-} && -e ${MCP_CANCEL_FILE} ]]
}

# mcp_run_with_progress --pattern REGEX [options] -- COMMAND …
mcp_run_with_progress() {
	local pattern="" extract=json output="" interval=0.2 file="" total="" is_dry_run="" errors=""
	while (($#)) && [[ $1 != -- ]]; do
		case "$1" in
		--dry-run) is_dry_run=1 ;;
		--quiet) ;; # lines without progress are never logged here
		--pattern | --extract | --stdout | --interval | --progress-file | --total | --stderr-file)
			(($# > 1)) || mcp_fail -32603 "mcp_run_with_progress: $1 needs a value"
			case "$1" in
			--pattern) pattern="$2" ;;
			--extract) extract="$2" ;;
			--stdout) output="$2" ;;
			--interval) interval="$2" ;;
			--progress-file) file="$2" ;;
			--total) total="$2" ;;
			--stderr-file) errors="$2" ;;
			esac
			shift
			;;
		*) mcp_fail -32603 "mcp_run_with_progress has no option $1" ;;
		esac
		shift
	done
	[[ ${1-} == -- ]] && shift
	if [[ -z ${pattern} ]] || ((!$#)); then
		mcp_fail -32603 "mcp_run_with_progress needs --pattern and a command after --"
	fi
	[[ ${interval} =~ ^[0-9]*\.?[0-9]+$ && ${interval} =~ [1-9] ]] || interval=0.2
	[[ -z ${errors} ]] || : >"${errors}"
	local status=0
	if [[ -n ${file} ]]; then
		_mcp_run_with_file "$@" || status=$?
		return "${status}"
	fi
	local stderr_fd reader
	# The reader must not keep stdout open, because $(…) waits until every process has closed it.
	exec {stderr_fd}> >(_mcp_read_progress >/dev/null)
	reader=$!
	if [[ -n ${output} ]]; then
		"$@" >"${output}" 2>&"${stderr_fd}" || status=$?
	else
		"$@" 2>&"${stderr_fd}" || status=$?
	fi
	exec {stderr_fd}>&-
	wait "${reader}" 2>/dev/null || true
	return "${status}"
}

# The following functions use the local variables of mcp_run_with_progress.
_mcp_run_with_file() {
	local buffer="" chunk descriptor process is_running=1 status=0
	: >"${file}"
	exec {descriptor}<"${file}"
	if [[ -n ${output} ]]; then
		"$@" >"${output}" &
	else
		"$@" &
	fi
	process=$!
	while [[ -n ${is_running} ]]; do
		kill -0 "${process}" 2>/dev/null || is_running="" # read the file once more
		while IFS= read -r chunk <&"${descriptor}"; do
			buffer+="${chunk}"$'\n'
			_mcp_split_progress
		done
		buffer+="${chunk}"
		_mcp_split_progress
		[[ -z ${is_running} ]] || sleep "${interval}"
	done
	exec {descriptor}<&-
	wait "${process}" || status=$?
	return "${status}"
}

_mcp_read_progress() {
	local buffer="" chunk code
	while :; do
		code=0
		IFS= read -r -t "${interval}" chunk || code=$?
		buffer+="${chunk}"
		((code)) || buffer+=$'\n'
		_mcp_split_progress
		((code == 0 || code > 128)) || break # above 128: a timeout, after which lines that end in \r are processed
	done
	[[ -z ${buffer} ]] || _mcp_process_line "${buffer}"
}

_mcp_split_progress() {
	buffer="${buffer//$'\r'/$'\n'}"
	while [[ ${buffer} == *$'\n'* ]]; do
		_mcp_process_line "${buffer%%$'\n'*}"
		buffer="${buffer#*$'\n'}"
	done
}

_mcp_process_line() {
	local line="$1" percent="" message="" _mcp_quoted
	[[ -n ${line} ]] || return 0
	if [[ ! ${line} =~ ${pattern} ]]; then
		if [[ -n ${errors} ]]; then
			printf '%s\n' "${line}" >>"${errors}"
		else
			printf '%s\n' "${line}" >&2
		fi
		return 0
	fi
	local first="${BASH_REMATCH[1]-}" second="${BASH_REMATCH[2]-}"
	case "${extract}" in
	json)
		local number='"progress"[[:space:]]*:[[:space:]]*([0-9]+)' words='"message"[[:space:]]*:[[:space:]]*("([^"\\]|\\.)*")'
		[[ ${line} =~ ${number} ]] && percent="${BASH_REMATCH[1]}"
		[[ ${line} =~ ${words} ]] && message="${BASH_REMATCH[1]}"
		;;
	match1)
		[[ ${first} =~ ^[0-9]+ ]] && percent="${BASH_REMATCH[0]}"
		if [[ -n ${percent} && ${total} =~ ^[1-9][0-9]*$ ]]; then
			percent=$((10#${percent} * 100 / total))
		fi
		;;
	ratio)
		if [[ ${first} =~ ^[0-9]+$ && ${second} =~ ^[0-9]*[1-9][0-9]*$ ]]; then
			percent=$((10#${first} * 100 / 10#${second}))
		fi
		;;
	esac
	if [[ -z ${percent} ]]; then
		_mcp_send_line '{}' # with progressExtendsTimeout, a line that matches restarts the timeout
		return 0
	fi
	percent=$((10#${percent} > 100 ? 100 : 10#${percent}))
	if [[ -z ${message} ]]; then
		_mcp_quote "${line:0:200}"
		message="${_mcp_quoted}"
	fi
	if [[ -n ${is_dry_run} ]]; then
		printf '{"progress":%s,"total":100,"message":%s}\n' "${percent}" "${message}" >&2
	else
		_mcp_send_line "{\"progress\":${percent},\"total\":100,\"message\":${message}}"
	fi
}

# mcp_with_retry ATTEMPTS BASE_DELAY -- COMMAND …: retry a status of 3 or higher, after 1, 2, 4… times the delay.
mcp_with_retry() {
	local max_attempts="${1:-3}" delay="${2:-1}" attempt=1 status pause
	shift "$(($# > 1 ? 2 : $#))"
	[[ ${1-} == -- ]] && shift
	[[ ${delay} =~ ^([0-9]*)\.?([0-9]*)$ ]] || delay=1
	local whole="${delay%%.*}" part="${delay#*.}"
	[[ ${delay} == *.* ]] || part=0
	part="${part}000"
	pause=$((10#${whole:-0} * 1000 + 10#${part:0:3}))
	while :; do
		status=0
		"$@" || status=$?
		if ((status < 3 || attempt >= max_attempts)); then
			return "${status}"
		fi
		mcp_log_debug tool-sdk "attempt ${attempt} of ${max_attempts} ended with status ${status}: ${1-}"
		local wait_ms=$((pause + (pause ? RANDOM % (pause / 4 + 1) : 0)))
		sleep "$((wait_ms / 1000)).$(printf '%03d' "$((wait_ms % 1000))")"
		pause=$((pause * 2))
		attempt=$((attempt + 1))
	done
}

# Roots --------------------------------------------------------------------------------------------------------------

mcp_roots_list() {
	[[ -z ${MCP_ROOTS_PATHS:-} ]] || printf '%s\n' "${MCP_ROOTS_PATHS}"
}

mcp_roots_count() {
	printf '%s\n' "${MCP_ROOTS_COUNT:-0}"
}

_mcp_realpath() {
	realpath -m -- "$1" 2>/dev/null || _mcp_values realpath "$1"
}

# mcp_roots_contains PATH: succeed if PATH is inside a root, after symbolic links and .. are resolved.
mcp_roots_contains() {
	local path root
	path="$(_mcp_realpath "$1")" || return 1
	while IFS= read -r root; do
		[[ -n ${root} ]] || continue
		root="$(_mcp_realpath "${root}")" || continue
		if [[ ${path} == "${root}" || ${path} == "${root%/}"/* ]]; then
			return 0
		fi
	done <<<"${MCP_ROOTS_PATHS:-}"
	return 1
}

# mcp_require_path POINTER [--default-to-single-root] [--allow-empty]
mcp_require_path() {
	local pointer="$1" _mcp_value is_single="" is_optional=""
	shift
	while (($#)); do
		case "$1" in
		--default-to-single-root) is_single=1 ;;
		--allow-empty) is_optional=1 ;;
		*) mcp_fail -32603 "mcp_require_path has no option $1" ;;
		esac
		shift
	done
	_mcp_find_arg "${pointer}" || _mcp_value=""
	if [[ -z ${_mcp_value} && -n ${is_single} && ${MCP_ROOTS_COUNT:-0} == 1 ]]; then
		_mcp_value="${MCP_ROOTS_PATHS%%$'\n'*}"
	fi
	if [[ -z ${_mcp_value} ]]; then
		[[ -n ${is_optional} ]] || mcp_fail_invalid_args "${pointer} is required"
		printf '\n'
		return
	fi
	if ! mcp_roots_contains "${_mcp_value}"; then
		mcp_fail_invalid_args "${pointer} is outside the allowed roots"
	fi
	_mcp_realpath "${_mcp_value}"
}

# Configuration ------------------------------------------------------------------------------------------------------

# Add the JSON object in $2 to `merged`; $1 is its source.
_mcp_config_add() {
	local object
	if object="$(_mcp_values object <<<"$2")"; then
		merged+="${object}"$'\n'
	else
		mcp_log_warn tool-sdk "$1 is not a JSON object, and is ignored"
	fi
}

# mcp_config_load [--env VARIABLE] [--file PATH] [--example PATH] [--defaults JSON]: earlier ones take precedence.
mcp_config_load() {
	local merged="" env="" file="" example="" defaults=""
	while (($#)); do
		case "$1" in
		--env) env="${2-}" ;;
		--file) file="${2-}" ;;
		--example) example="${2-}" ;;
		--defaults) defaults="${2-}" ;;
		*) mcp_fail -32603 "mcp_config_load has no option $1" ;;
		esac
		shift "$(($# > 1 ? 2 : 1))"
	done
	[[ -z ${defaults} ]] || _mcp_config_add "--defaults" "${defaults}"
	[[ ! -r ${example} ]] || _mcp_config_add "${example}" "$(<"${example}")"
	[[ ! -r ${file} ]] || _mcp_config_add "${file}" "$(<"${file}")"
	if [[ -n ${env} && -n ${!env:-} ]]; then
		local given="${!env}"
		[[ ${given} == [[:space:]]*{* || ${given} == {* || ! -r ${given} ]] || given="$(<"${given}")"
		_mcp_config_add "${env}" "${given}"
	fi
	MCP_CONFIG_JSON="$(_mcp_values merge <<<"${merged}")"
	export MCP_CONFIG_JSON
}

# mcp_config_get PATH [--default VALUE]: without a default, fail if there is no value.
mcp_config_get() {
	local _mcp_value
	if _mcp_find "$1" _mcp_print_json "${MCP_CONFIG_JSON:-}" ""; then
		printf '%s\n' "${_mcp_value}"
	elif [[ ${2-} == --default ]]; then
		printf '%s\n' "${3-}"
	else
		return 1
	fi
}

# Downloads ----------------------------------------------------------------------------------------------------------

# mcp_download_safe --url URL --out FILE [--allow HOSTS] [--deny HOSTS] [--timeout S] [--max-bytes N] [--retries N]
# [--user-agent TEXT]: print {"success":true,"bytes":…,"path":…} or {"success":false,"error":{…}}, always with status 0.
mcp_download_safe() {
	"${TIDINGS_PYTHON:-python3}" -I -S "${_MCP_SDK_DIR}/download.py" "$@" ||
		printf '{"success":false,"error":{"type":"provider_error","message":"the download could not be started"}}\n'
}

mcp_download_safe_or_fail() {
	local answer
	answer="$(mcp_download_safe "$@")"
	if [[ "$(_mcp_get '.success' <<<"${answer}")" != true ]]; then
		mcp_fail_invalid_args "$(_mcp_get '.error.message' <<<"${answer}")" "${answer}"
	fi
	_mcp_get '.path' <<<"${answer}"
}

# Asking the user ----------------------------------------------------------------------------------------------------

# _mcp_ask QUESTION_JSON [SECONDS]: print {"action":…,"content":…}. A client that can't be asked declines.
_mcp_ask() {
	local answer="${MCP_ELICIT_RESPONSE_FILE:-}" waits="${2:-${MCP_ELICIT_DEFAULT_TIMEOUT:-30}}"
	if [[ ${MCP_ELICIT_SUPPORTED:-0} != 1 || -z ${answer} || -z ${_MCP_FD} ]]; then
		printf '{"action":"decline","content":null}\n'
		return
	fi
	rm -f -- "${answer}"
	_mcp_send_line "{\"question\":$1}"
	[[ ${waits} =~ ^[0-9]+$ ]] || waits=30
	for ((waits *= 20; waits > 0; waits--)); do
		if [[ -e ${answer} ]]; then
			printf '%s\n' "$(<"${answer}")"
			return
		fi
		if mcp_is_cancelled; then
			printf '{"action":"cancel","content":null}\n'
			return
		fi
		sleep 0.05
	done
	printf '{"action":"error","content":null}\n'
}

# mcp_elicit MESSAGE SCHEMA_JSON [SECONDS] [MODE]
mcp_elicit() {
	local _mcp_quoted
	_mcp_quote "${1-}"
	_mcp_ask "{\"message\":${_mcp_quoted},\"schema\":${2:-{\}},\"mode\":\"${4:-form}\"}" "${3-}"
}

# mcp_elicit_url MESSAGE URL [SECONDS]
mcp_elicit_url() {
	local _mcp_quoted message
	_mcp_quote "${1-}"
	message="${_mcp_quoted}"
	_mcp_quote "${2-}"
	_mcp_ask "{\"message\":${message},\"url\":${_mcp_quoted},\"mode\":\"url\"}" "${3-}"
}

# _mcp_elicit_field MESSAGE NAME SCHEMA: ask for one required value.
_mcp_elicit_field() {
	local _mcp_quoted
	_mcp_quote "$2"
	mcp_elicit "$1" "{\"type\":\"object\",\"properties\":{${_mcp_quoted}:$3},\"required\":[${_mcp_quoted}]}"
}

# Put a JSON array of {"const":…,"title":…} for arguments VALUE:TITLE into _mcp_titled.
_mcp_make_titled() {
	local option separator=""
	_mcp_titled=""
	for option in "$@"; do
		_mcp_quote "${option%%:*}"
		_mcp_titled+="${separator}{\"const\":${_mcp_quoted}"
		_mcp_quote "${option#*:}"
		_mcp_titled+=",\"title\":${_mcp_quoted}}"
		separator=","
	done
	_mcp_titled="[${_mcp_titled}]"
}

mcp_elicit_string() { _mcp_elicit_field "${1-}" "${2:-value}" '{"type":"string"}'; }
mcp_elicit_confirm() { _mcp_elicit_field "${1-}" confirmed '{"type":"boolean"}'; }
mcp_elicit_choice() {
	_mcp_elicit_field "${1-}" choice "{\"type\":\"string\",\"enum\":$(mcp_json_arr "${@:2}")}"
}
mcp_elicit_titled_choice() {
	local _mcp_titled _mcp_quoted
	_mcp_make_titled "${@:2}"
	_mcp_elicit_field "${1-}" choice "{\"type\":\"string\",\"oneOf\":${_mcp_titled}}"
}
mcp_elicit_multi_choice() {
	local items
	items="{\"type\":\"string\",\"enum\":$(mcp_json_arr "${@:2}")}"
	_mcp_elicit_field "${1-}" choices "{\"type\":\"array\",\"items\":${items}}"
}
mcp_elicit_titled_multi_choice() {
	local _mcp_titled _mcp_quoted
	_mcp_make_titled "${@:2}"
	_mcp_elicit_field "${1-}" choices "{\"type\":\"array\",\"items\":{\"anyOf\":${_mcp_titled}}}"
}

mcp_client_supports_extension() { return 1; }
mcp_client_supports_ui() { return 1; }
