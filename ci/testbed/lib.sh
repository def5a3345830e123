#!/usr/bin/env bash
# shellcheck disable=SC2034  # what is set here is used where it is sourced
# What the parts of the test bed share. Sourced, never run.

# What is running lives in STATE and is gone after `down`; what is only slow to make stays in CACHE.
STATE="${TOOLKIT_TESTBED_STATE:-/var/tmp/toolkit-testbed}"
CACHE="${TOOLKIT_TESTBED_CACHE:-/var/cache/toolkit-testbed}"

say() { printf 'testbed: %s\n' "$*" >&2; }

die() {
	reason=$*
	say "$reason"
	exit 1
}

# For what this machine cannot do, as against what went wrong: tests skip on this exit code.
cannot() {
	reason=$*
	say "$reason"
	exit 3
}

# The start time of a process, in clock ticks since boot: with its id, a name that is never reused.
started_at() {
	local stat
	stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
	# The command's name, in brackets, may hold spaces: count the fields after it.
	cut -d' ' -f20 <<<"${stat##*) }"
}

# record_pid FILE PID: remember a process that the test bed started.
record_pid() { printf '%s %s\n' "$2" "$(started_at "$2")" >"$1"; }

# alive FILE: is the process recorded in FILE still that process, and not a zombie?
alive() {
	local pid start
	read -r pid start 2>/dev/null <"$1" || return 1
	[ "$(started_at "$pid")" = "$start" ] && ! grep -q '^State:.*Z' "/proc/$pid/status" 2>/dev/null
}

# stop_pid FILE SIGNAL: end the recorded process and wait until it is gone.
stop_pid() {
	local pid
	if alive "$1"; then
		read -r pid _ <"$1"
		kill -s "$2" "$pid"
		wait_for 10 not alive "$1" || kill -s KILL "$pid"
		wait_for 10 not alive "$1" || say "process $pid does not end"
	fi
	rm -f "$1"
}

not() { ! "$@"; }

# wait_for SECONDS COMMAND…: run COMMAND until it succeeds; fail when the time is over.
wait_for() {
	local end=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.1
	done
}

# one_at_a_time PART: no two `up` or `down` of a part at once, whichever checkout they come from.
# The lock is on file descriptor 9, which nothing that stays behind may inherit.
one_at_a_time() {
	mkdir -p /run/lock
	exec 9>"/run/lock/toolkit-testbed.$1"
	flock --wait 600 9 || die "another ci/testbed command has held the test bed for 10 minutes"
}

# apt_install PACKAGE…: install what is missing, and start none of its services.
apt_install() {
	local missing=() package policy=/usr/sbin/policy-rc.d log
	for package in "$@"; do
		dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	say "installing ${missing[*]}"
	log=$(mktemp)
	if [ ! -e "$policy" ]; then
		printf '#!/bin/sh\n# toolkit test bed: start no service while packages are installed\nexit 101\n' >"$policy"
		chmod 755 "$policy"
	fi
	local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300)
	if ! "${apt[@]}" install --no-install-recommends "${missing[@]}" >"$log" 2>&1 9>&- &&
		! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 9>&-; then
		tail -n 15 "$log" >&2
		rm -f "$log"
		restore_policy "$policy"
		cannot "apt-get could not install ${missing[*]}"
	fi
	rm -f "$log"
	restore_policy "$policy"
}

# Remove policy-rc.d where it is ours, and only there.
restore_policy() {
	if grep -q 'toolkit test bed' "$1" 2>/dev/null; then rm -f "$1"; fi
}
