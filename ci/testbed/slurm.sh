#!/usr/bin/env bash
# A real Slurm cluster of two nodes on this machine: slurm.sh up [--release 22.05|24.11] | down | status
#
# Four hosts: this machine is the login node; `ctl` runs slurmctld, slurmdbd and its database; `node01`
# and `node02` run slurmd. The last three are sets of namespaces (network, mount, PID, UTS, IPC), joined
# by a bridge that lies in ctl's network, so nothing of this machine's network is touched but one
# interface. No service manager, no container engine; needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"

bed=$STATE/slurm
run=/run/toolkit-testbed
link=tbslurm0
tester=tester
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge slurmdbd mariadb-server-core mariadb-client-core iproute2)
clients=(srun sbatch salloc squeue sinfo scontrol scancel sacct sacctmgr sprio sstat)
root_packages=(util-linux procps hostname python3 jq squashfs-tools squashfuse fuse3 gawk curl parallel zstd pigz)
declare -A suite=([22.05]=bookworm [24.11]=trixie)
hosts=(ctl node01 node02)
declare -A octet=([login]=1 [ctl]=2 [node01]=11 [node02]=12)
hosts_begin='# toolkit test bed: begin'
hosts_end='# toolkit test bed: end'

# ---- what is there

# The Slurm release in the packages of this machine's own distribution, such as 22.05.
own_release() {
	local version
	version=$(dpkg-query -W -f '${Version}' slurmctld 2>/dev/null ||
		apt-cache policy slurmctld 2>/dev/null | sed -n 's/ *Candidate: \([0-9].*\)/\1/p')
	if [ -z "$version" ]; then
		apt-get update -qq >/dev/null 2>&1 9>&- || true
		version=$(apt-cache policy slurmctld | sed -n 's/ *Candidate: \([0-9].*\)/\1/p')
	fi
	cut -d. -f1,2 <<<"${version%%-*}"
}

# A /24 that overlaps no route of this machine, out of the range that is reserved for test networks.
free_subnet() {
	local third
	for third in 22 23 24 25 26; do
		if [ -z "$(ip -4 route show root "198.18.$third.0/24")$(ip -4 route show match "198.18.$third.0/24" | grep -v ^default)" ]; then
			echo "198.18.$third"
			return
		fi
	done
	die "198.18.22.0/24 to 198.18.26.0/24 are all routed on this machine"
}

# pyxis for a release: it must be compiled against the Slurm that loads it.
find_pyxis() {
	local so
	command -v enroot >/dev/null || return 0
	if [ -n "${TOOLKIT_PYXIS_SO:-}" ]; then
		echo "$TOOLKIT_PYXIS_SO"
		return
	fi
	local places=(/usr/local/lib/slurm-"$release"/spank_pyxis.so)
	# The usual places hold the one for this machine's own Slurm.
	if [ "$release" = "$own" ]; then
		places+=(/usr/local/lib/slurm/spank_pyxis.so /usr/lib/slurm/spank_pyxis.so /usr/lib/*/slurm{,-wlm}/spank_pyxis.so)
	fi
	for so in "${places[@]}"; do
		if [ -e "$so" ]; then
			echo "$so"
			return
		fi
	done
}

slurm_up() { timeout 5 "$bed/bin/scontrol" ping 2>/dev/null | grep -q 'is UP'; }

# Both nodes in a state in which they run jobs.
nodes_up() {
	[ "$(timeout 5 "$bed/bin/sinfo" -h -N -p main -o '%N %T' 2>/dev/null | grep -cE ' (idle|mixed|allocated|completing)$')" = 2 ]
}

healthy() {
	local host
	[ -e "$bed/release" ] || return 1
	for host in login "${hosts[@]}"; do
		alive "$bed/pids/$host" || return 1
	done
	slurm_up && nodes_up
}

# ---- up

check_machine() {
	[ "$(id -u)" = 0 ] || die "the Slurm test bed needs root: it makes network and mount namespaces"
	command -v apt-get >/dev/null || die "the Slurm test bed is made of Debian packages, and this machine has no apt-get"
	unshare --mount --net --uts --ipc --pid --fork true 2>/dev/null ||
		die "this machine lets root make no namespaces (a container needs --privileged)"
	if [ -e "$run/slurm.state" ] && [ "$(cat "$run/slurm.state")" != "$STATE" ]; then
		die "another test bed is up, with its state in $(cat "$run/slurm.state"); take that one down first"
	fi
	if id "$tester" >/dev/null 2>&1; then
		die "the user '$tester' exists and is not the test bed's; rename or remove it"
	fi
}

write_config() {
	local password
	mkdir -p "$bed"/{bin,etc,log,pids,state,spool,dev,db} "$STATE/shared" "$run"
	chmod 755 "$STATE" "$bed"
	chmod 700 "$bed/db"
	chmod 1777 "$STATE/shared"
	mkdir -p "$bed"/{login,ctl,node01,node02}
	echo "$STATE" >"$run/slurm.state"
	head -c 1024 /dev/urandom >"$bed/etc/munge.key"
	chmod 400 "$bed/etc/munge.key"
	mknod -m 666 "$bed/dev/gpu0" c 1 3
	mknod -m 666 "$bed/dev/gpu1" c 1 3
	if [ -e /dev/fuse ]; then mknod -m 666 "$bed/dev/fuse" c 10 229; fi
	{
		echo "127.0.0.1 localhost"
		hosts_lines "$subnet"
	} >"$bed/etc/hosts"
	password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
	(
		umask 077
		cat >"$bed/etc/init.sql" <<-END
			CREATE DATABASE IF NOT EXISTS slurm_acct;
			CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '$password';
			GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1';
		END
		cat >"$bed/etc/slurmdbd.conf" <<-END
			AuthType=auth/munge
			AuthInfo=socket=$run/munge.socket
			DbdHost=ctl
			SlurmUser=root
			StorageType=accounting_storage/mysql
			StorageHost=127.0.0.1
			StorageUser=slurm
			StoragePass=$password
			StorageLoc=slurm_acct
			LogFile=$bed/log/slurmdbd.log
			PidFile=$run/slurmdbd.pid
		END
	)
	cat >"$bed/etc/slurm.conf" <<-END
		ClusterName=testbed
		SlurmctldHost=ctl($subnet.${octet[ctl]})
		SlurmUser=root
		AuthType=auth/munge
		# A requeued job waits until the credential of its last run has expired: 2 minutes by default.
		AuthInfo=socket=$run/munge.socket,cred_expire=20
		CredType=cred/munge
		StateSaveLocation=$bed/state
		SlurmdSpoolDir=$bed/spool/%n
		SlurmctldPidFile=$run/slurmctld.pid
		SlurmdPidFile=$run/slurmd.pid
		SlurmctldLogFile=$bed/log/slurmctld.log
		SlurmdLogFile=$bed/log/slurmd.%n.log
		ProctrackType=proctrack/linuxproc
		TaskPlugin=task/none
		MpiDefault=none
		ReturnToService=2
		MessageTimeout=20
		SlurmdTimeout=30
		KillWait=2
		CompleteWait=0
		PlugStackConfig=$bed/etc/plugstack.conf

		SelectType=select/cons_tres
		SelectTypeParameters=CR_CPU_Memory
		DefMemPerCPU=4000
		SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0

		AccountingStorageType=accounting_storage/slurmdbd
		AccountingStorageHost=ctl
		AccountingStoragePass=$run/munge.socket
		AccountingStorageTRES=gres/gpu
		JobAcctGatherType=jobacct_gather/linux
		JobAcctGatherFrequency=task=1

		GresTypes=gpu
		# More CPUs and memory than this machine may have: what counts here is how Slurm hands them out.
		SlurmdParameters=config_overrides
		NodeName=node01 NodeAddr=$subnet.${octet[node01]} CPUs=8 RealMemory=32000 Gres=gpu:fake:2
		NodeName=node02 NodeAddr=$subnet.${octet[node02]} CPUs=8 RealMemory=32000 Gres=gpu:fake:2
		PartitionName=main Nodes=node01,node02 Default=YES MaxTime=INFINITE
		PartitionName=short Nodes=node01,node02 MaxTime=1
	END
	echo "Name=gpu Type=fake File=$bed/dev/gpu[0-1]" >"$bed/etc/gres.conf"
	if [ -n "$plugin_dir" ]; then echo "PluginDir=$plugin_dir" >>"$bed/etc/slurm.conf"; fi
	: >"$bed/etc/plugstack.conf"
	if [ -n "$pyxis" ]; then configure_pyxis; fi
}

# What a site's administrator decides. Images are mounted where pyxis can do that, not unpacked, and
# what enroot keeps is local to a node, since the two nodes share this machine's file system.
configure_pyxis() {
	local squashfuse='' sysconf
	if command -v squashfuse >/dev/null && grep -q use_squashfuse "$pyxis"; then squashfuse=use_squashfuse=1; fi
	echo "required $pyxis $squashfuse" >"$bed/etc/plugstack.conf"
	# The directory of enroot's configuration is compiled into it.
	sysconf=$(sed -n 's|^config::init "\(.*\)/enroot.conf"$|\1|p' "$(command -v enroot)")
	echo "$sysconf" >"$bed/etc/enroot.sysconf"
	mkdir -p "$bed/etc/enroot.conf.d"
	mkdir -p "$bed"/node0{1,2}/local/enroot-{data,cache}
	chmod 1777 "$bed"/node0{1,2}/local/enroot-{data,cache}
	cp "$sysconf"/enroot.conf.d/*.conf "$bed/etc/enroot.conf.d/" 2>/dev/null || true
	cat >"$bed/etc/enroot.conf.d/00-testbed.conf" <<-'END'
		ENROOT_RUNTIME_PATH /run/enroot/user-$(id -u)
		ENROOT_DATA_PATH /run/toolkit-testbed/local/enroot-data/user-$(id -u)
		ENROOT_CACHE_PATH /run/toolkit-testbed/local/enroot-cache/user-$(id -u)
	END
}

# The root file system of another release, made once.
make_root() {
	local root=$1 mirror log
	[ ! -e "$root" ] || return 0
	apt_install mmdebstrap
	# shellcheck disable=SC2016  # apt-get fills in the name, not the shell
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)
	say "making the root file system of Debian ${suite[$release]} (once; kept in $CACHE)"
	mkdir -p "$CACHE"
	chmod 755 "$CACHE"
	rm -rf "$root.part"
	log=$(mktemp)
	if ! timeout 1200 mmdebstrap --quiet --variant=essential \
		--include="$(IFS=,; echo "${packages[*]},${root_packages[*]}")" \
		"${suite[$release]}" "$root.part" ${mirror:+"$mirror"} >"$log" 2>&1 9>&-; then
		tail -n 15 "$log" >&2
		rm -rf "$root.part" "$log"
		die "mmdebstrap could not make Debian ${suite[$release]}"
	fi
	rm -f "$log"
	mv "$root.part" "$root"
}

# A program of the other release, run on this machine by that release's own loader and libraries: no
# chroot, so that an ordinary user can run it, in any directory, and find every file where it is.
foreign_program() {
	local root=$1 program=$2 lib
	lib=$(echo "$root"/usr/lib/*-linux-gnu)
	cat >"$bed/bin/${program##*/}" <<-END
		#!/bin/sh
		exec $(echo "$root"/lib*/ld-linux-*.so.?) --library-path $lib/slurm-wlm:$lib $root$program "\$@"
	END
	chmod 755 "$bed/bin/${program##*/}"
}

hosts_lines() {
	local name
	for name in ctl node01 node02; do echo "$1.${octet[$name]} $name"; done
	echo "$1.${octet[login]} $(hostname -s) login"
}

# The login node finds the nodes by name, as on a cluster.
add_hosts() {
	{
		printf '%s\n' "$hosts_begin"
		hosts_lines "$1" | grep -v ' login$'
		printf '%s\n' "$hosts_end"
	} >>/etc/hosts
}

# Written in place: in a container /etc/hosts is a mount, which cannot be replaced.
remove_hosts() {
	local rest
	rest=$(sed "/^$hosts_begin/,/^$hosts_end/d" /etc/hosts)
	if grep -q "^$hosts_begin" /etc/hosts; then printf '%s\n' "$rest" >/etc/hosts; fi
}

start_host() {
	env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
		TOOLKIT_TESTBED_STATE="$STATE" TOOLKIT_TESTBED_CACHE="$CACHE" \
		setsid unshare --mount --propagation slave --net --uts --ipc --pid --fork --kill-child=KILL -- \
		"$here/slurm-host.sh" "$1" "$2" "$bed" "$3" </dev/null >"$bed/log/$1.log" 2>&1 9>&- &
	wait_for 10 alive "$bed/pids/$1" || die "the host $1 did not start"
}

# What an administrator does once the daemons run.
register() {
	wait_for 30 slurm_up || die "slurmctld does not answer"
	sacctmgr -i add account testbed Description=testbed Organization=testbed >"$bed/log/sacctmgr.log" 2>&1
	sacctmgr -i add user root,"$tester" Account=testbed >>"$bed/log/sacctmgr.log" 2>&1
}

up() {
	local subnet pyxis root=/ plugin_dir='' host tool pid begun=$SECONDS
	if healthy; then
		if [ "$(cat "$bed/release")" = "$release" ]; then
			say "Slurm $release is up already"
			return
		fi
		die "Slurm $(cat "$bed/release") is up; run ci/testbed/down slurm first, then ask for $release"
	fi
	if [ -e "$bed" ]; then
		say "found a cluster that is not healthy; removing it first"
		down
	fi
	check_machine
	trap failed EXIT
	if [ "$release" = "$own" ]; then
		apt_install "${packages[@]}"
	else
		root=$CACHE/root-$release
		make_root "$root"
		plugin_dir=$(echo "$root"/usr/lib/*-linux-gnu/slurm-wlm)
	fi
	subnet=$(free_subnet)
	pyxis=$(find_pyxis)
	write_config
	useradd --create-home --shell /bin/bash "$tester"
	cp /etc/passwd /etc/group "$bed/etc/"
	for tool in "${clients[@]}"; do
		if [ "$root" = / ]; then
			ln -s "$(command -v "$tool")" "$bed/bin/$tool"
		else
			foreign_program "$root" "/usr/bin/$tool"
		fi
	done
	if [ "$root" != / ]; then foreign_program "$root" /usr/sbin/munged; fi
	PATH=$bed/bin:$PATH
	add_hosts "$subnet"
	for host in "${hosts[@]}"; do start_host "$host" "$subnet.${octet[$host]}" "$root"; done
	read -r pid _ <"$bed/pids/ctl"
	ip link add "$link" type veth peer name login netns "$pid"
	ip addr add "$subnet.${octet[login]}/24" dev "$link"
	ip link set "$link" up
	for host in node01 node02; do
		ip link add "$host" netns "$pid" type veth peer name eth0 netns "$(cut -d' ' -f1 "$bed/pids/$host")"
	done
	"$here/slurm-munged.sh" "$bed" login 9>&-
	record_pid "$bed/pids/login" "$(cat "$run/munged.pid")"
	export SLURM_CONF=$bed/etc/slurm.conf
	register
	wait_for 60 nodes_up || die "the nodes did not become ready"
	timeout 30 srun -N2 --ntasks-per-node=1 true || die "a first job on both nodes failed"

	echo "$release" >"$bed/release"
	cat >"$STATE/env.slurm" <<-END
		export SLURM_CONF=$SLURM_CONF
		export TOOLKIT_TESTBED_RELEASE=$release
		export TOOLKIT_TESTBED_USER=$tester
		export TOOLKIT_TESTBED_SHARED=$STATE/shared
		export TOOLKIT_TESTBED_PYXIS=$pyxis
	END
	# Where the clients of this release are not the machine's own.
	if [ "$root" != / ]; then echo "export PATH=$bed/bin:\$PATH" >>"$STATE/env.slurm"; fi
	trap - EXIT
	say "Slurm $release is up after $((SECONDS - begun)) s: node01 and node02 with 8 CPUs and 2 fake GPUs each; pyxis: ${pyxis:-not installed}"
}

# A half-made cluster is of no use to anyone: say what its logs say, then remove it.
failed() {
	local log
	say "the cluster did not come up; the ends of its logs:"
	for log in "$bed"/log/*; do
		if [ -s "$log" ]; then
			printf -- '--- %s\n' "${log##*/}" >&2
			tail -n 8 "$log" >&2
		fi
	done
	down
}

# ---- down

down() {
	local host
	for host in node01 node02 ctl; do stop_pid "$bed/pids/$host" KILL; done
	stop_pid "$bed/pids/login" TERM
	# The last process of a network takes the interface along, a moment later.
	wait_for 5 not ip link show "$link" || ip link del "$link"
	if id "$tester" >/dev/null 2>&1 && [ -e "$bed" ]; then
		userdel --remove "$tester" 2>/dev/null || say "could not remove the user $tester"
	fi
	remove_hosts
	rm -rf "$bed" "$STATE/shared" "$STATE/env.slurm" "$run"
	rmdir "$STATE" 2>/dev/null || true
	say "Slurm is down"
}

status() {
	if healthy; then
		say "Slurm $(cat "$bed/release") is up"
		SLURM_CONF=$bed/etc/slurm.conf timeout 10 "$bed/bin/sinfo" -N -o '%N %T %c %G' >&2
	elif [ -e "$bed" ]; then
		say "Slurm is not healthy; see $bed/log"
		return 1
	else
		say "Slurm is not up"
		return 1
	fi
}

verb=${1:-}
shift || true
release=
if [ "${1:-}" = --release ]; then
	release=${2:?--release takes 22.05 or 24.11}
	shift 2
fi
export SLURM_CONF=$bed/etc/slurm.conf
case $verb in
up)
	one_at_a_time slurm
	own=$(own_release)
	release=${release:-$own}
	if [ "$release" != "$own" ] && [ -z "${suite[$release]:-}" ]; then
		die "no release $release: choose ${!suite[*]}, or leave it out for this machine's own $own"
	fi
	up
	;;
down)
	one_at_a_time slurm
	down
	;;
status) status ;;
*)
	echo "usage: slurm.sh up [--release 22.05|24.11] | down | status" >&2
	exit 2
	;;
esac
