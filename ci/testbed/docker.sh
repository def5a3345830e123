#!/usr/bin/env bash
# A real Docker engine and two real registries on this machine: docker.sh up | down | status
#
# The engine has its own socket, data and networks and touches no other engine's. One registry is open,
# the other asks for a password. A base image with Python is made here, from the machine's own package
# mirror, so that no public registry is needed. Needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=/dev/null
. "$here/lib.sh"

bed=$STATE/docker
socket=$bed/docker.sock
registries=(open auth)
# Networks made in this engine get their addresses from here, which is how `down` knows its bridges.
pool=198.19
# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
base=toolkit-testbed/base:$codename
tarball=$CACHE/base-$codename-$(dpkg --print-architecture).tar

engine() { DOCKER_CONFIG=$bed/config timeout 60 docker --host "unix://$socket" "$@"; }

# The port that a registry chose for itself, from its log.
port_of() { sed -n 's/.*msg="listening on 127\.0\.0\.1:\([0-9]*\)".*/\1/p' "$bed/log/registry-$1" 2>/dev/null | grep -m1 .; }

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$(port_of "$1")") 2>/dev/null; }

healthy() {
	local name
	alive "$bed/pids/dockerd" && engine image inspect "$base" >/dev/null 2>&1 || return 1
	for name in "${registries[@]}"; do
		alive "$bed/pids/registry-$name" && listening "$name" || return 1
	done
	[ -e "$STATE/env.docker" ]
}

# ---- up

# In the background, out of this terminal's reach, with the lock's descriptor closed.
start() {
	local name=$1
	shift
	setsid "$@" >"$bed/log/$name" 2>&1 </dev/null 9>&- &
	record_pid "$bed/pids/$name" $!
}

fail() {
	say "$1; the end of $bed/log/$2:"
	tail -n 15 "$bed/log/$2" >&2 || true
	exit 1
}

install_packages() {
	local packages=()
	# Where another engine is installed (docker-ce), Debian's would conflict with it, and is not needed.
	command -v dockerd >/dev/null || packages+=(docker.io)
	# From Debian 13 on, the client is a package of its own.
	if ! command -v docker >/dev/null && apt-cache show docker-cli >/dev/null 2>&1; then packages+=(docker-cli); fi
	command -v docker-registry >/dev/null || packages+=(docker-registry)
	[ -e "$tarball" ] || packages+=(mmdebstrap ca-certificates)
	[ ${#packages[@]} -eq 0 ] || apt_install "${packages[@]}"
}

start_engine() {
	local known flags=(
		--host "unix://$socket" --data-root "$bed/data" --exec-root "$bed/exec" --pidfile "$bed/dockerd.pid"
		--containerd-namespace toolkit-testbed --containerd-plugins-namespace toolkit-testbed-plugins
		--bridge none --iptables=false --ip-forward=false
		--default-address-pool "base=$pool.0.0/16,size=24" --storage-driver overlay2
		--exec-opt native.cgroupdriver=cgroupfs --cgroup-parent /toolkit-testbed
	)
	known=$(dockerd --help)
	# Gone since Docker 25; before, the default needs a capability that a container or VM may lack.
	if [[ $known == *--oom-score-adjust* ]]; then flags+=(--oom-score-adjust=0); fi
	if [[ $known == *--ip6tables* ]]; then flags+=(--ip6tables=false); fi
	start dockerd dockerd "${flags[@]}"
	wait_for 60 engine version || fail "the Docker engine did not start" dockerd
}

start_registry() {
	local name=$1 config=$bed/registry-$1.yml
	cat >"$config" <<-EOF
		version: 0.1
		log: {accesslog: {disabled: true}, level: info}
		storage: {filesystem: {rootdirectory: $bed/registry-$name}, delete: {enabled: true}}
		http: {addr: "127.0.0.1:0"}
	EOF
	if [ "$name" = auth ]; then
		printf 'auth: {htpasswd: {realm: testbed, path: %s}}\n' "$bed/htpasswd" >>"$config"
		write_password
	fi
	start "registry-$name" docker-registry serve "$config"
	wait_for 20 listening "$name" || fail "the registry did not start" "registry-$name"
}

# A new password each time; it is in one file that only its owner can read, and in no argument.
write_password() {
	(
		umask 077
		od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$bed/password"
		perl -e 'my $password = <STDIN>;
			open my $random, "<", "/dev/urandom"; read $random, my $bytes, 22;
			my $salt = join "", map { (".", "/", "A" .. "Z", "a" .. "z", 0 .. 9)[ord($_) % 64] } split //, $bytes;
			print "tester:", crypt($password, "\$2y\$05\$$salt"), "\n"' <"$bed/password" >"$bed/htpasswd"
	)
}

# Where this machine gets its own packages from.
mirror() {
	# shellcheck disable=SC2016  # apt's own variables
	apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Identifier: Packages' |
		awk -v codename="$codename" '$1 == codename { print $2; exit }'
}

make_base() {
	if [ ! -e "$tarball" ]; then
		local from log=$bed/log/base
		from=$(mirror)
		[ -n "$from" ] || die "apt knows no mirror for $codename: run apt-get update"
		say "making a base image of $codename with Python"
		mkdir -p "$CACHE"
		# The bundle of certificates is the machine's own, which may know a proxy's.
		timeout 600 mmdebstrap --quiet --format=tar --variant=minbase --include=python3,python3-venv,ca-certificates \
			--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
			--dpkgopt='path-exclude=/usr/share/locale/*' \
			--customize-hook='copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs' \
			"$codename" "$tarball.part" "$from" >"$log" 2>&1 9>&- || {
			rm -f "$tarball.part"
			fail "the base image could not be made" base
		}
		mv "$tarball.part" "$tarball"
	fi
	engine import - "$base" <"$tarball" >"$bed/log/import" 2>&1 || fail "the base image could not be imported" import
}

# What no `up` can change: said before anything is touched.
require() {
	[ "$(id -u)" -eq 0 ] || cannot "a Docker engine needs root"
	unshare --mount true 2>/dev/null || cannot "a Docker engine needs namespaces, which are not allowed here"
	if [ -z "$codename" ] || ! command -v apt-get >/dev/null; then
		cannot "the test bed's Docker engine needs Debian or Ubuntu"
	fi
}

up() {
	if healthy; then
		say "the Docker engine is up already"
		return
	fi
	clear_away
	# An `up` that fails has said why, and leaves nothing behind.
	trap clear_away EXIT
	install_packages
	mkdir -p "$bed/log" "$bed/pids" "$bed/config"
	start_engine
	for name in "${registries[@]}"; do start_registry "$name"; done
	make_base
	cat >"$STATE/env.docker" <<-EOF
		export DOCKER_HOST=unix://$socket
		export TOOLKIT_TESTBED_BASE=$base
		export TOOLKIT_TESTBED_REGISTRY=127.0.0.1:$(port_of open)
		export TOOLKIT_TESTBED_REGISTRY_AUTH=127.0.0.1:$(port_of auth)
		export TOOLKIT_TESTBED_REGISTRY_USER=tester
		export TOOLKIT_TESTBED_REGISTRY_PASSWORD_FILE=$bed/password
	EOF
	trap - EXIT
	say "a Docker engine is up at unix://$socket"
}

# ---- down

# What an engine of ours left behind when it was killed: containerd and its shims, which name the bed in
# their arguments, and the containers' own processes, which are in our control groups.
left_behind() {
	local process
	for process in /proc/[0-9]*; do
		if grep -qF ":/toolkit-testbed/" "$process/cgroup" ||
			{ grep -qF containerd "$process/comm" && grep -qF "$bed/exec" "$process/cmdline"; }; then
			echo "${process#/proc/}"
		fi
	done 2>/dev/null
}

none_left_behind() { [ -z "$(left_behind)" ]; }

# All that an earlier `up` started or mounted, also after a crash.
clear_away() {
	local name containers pid mounted bridge
	if alive "$bed/pids/dockerd"; then
		mapfile -t containers < <(engine ps --all --quiet 2>/dev/null)
		[ ${#containers[@]} -eq 0 ] || engine rm --force "${containers[@]}" >/dev/null 2>&1 || true
		engine network prune --force >/dev/null 2>&1 || true
	fi
	for name in "${registries[@]}"; do stop_pid "$bed/pids/registry-$name" TERM; done
	stop_pid "$bed/pids/dockerd" TERM
	for pid in $(left_behind); do kill -s KILL "$pid" 2>/dev/null || true; done
	wait_for 10 none_left_behind || say "processes $(left_behind | xargs) do not end"
	while read -r _ mounted _; do umount --lazy "$mounted"; done < <(grep -F " $bed/" /proc/mounts | tac)
	for bridge in $(ip -o -4 address 2>/dev/null | awk -v pool="$pool." '$2 ~ /^br-/ && index($4, pool) == 1 { print $2 }'); do
		ip link del "$bridge"
	done
	find /sys/fs/cgroup -depth -type d -path '*/toolkit-testbed*' -exec rmdir {} + 2>/dev/null || true
	rm -rf "$bed" "$STATE/env.docker"
}

down() {
	clear_away
	rmdir "$STATE" 2>/dev/null || true
	say "Docker is down"
}

status() {
	if healthy; then
		say "a Docker engine $(engine version --format '{{.Server.Version}}') is up at unix://$socket"
		for name in "${registries[@]}"; do say "a registry ($name) is up at 127.0.0.1:$(port_of "$name")"; done
	elif [ -e "$bed" ]; then
		say "Docker is not healthy; see $bed/log"
		return 1
	else
		say "Docker is not up"
		return 1
	fi
}

case ${1:-} in
up)
	require
	one_at_a_time docker
	up
	;;
down)
	one_at_a_time docker
	down
	;;
status) status ;;
*)
	echo "usage: docker.sh up | down | status" >&2
	exit 2
	;;
esac
