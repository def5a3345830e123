#!/usr/bin/env bash
# A real Slurm cluster of two nodes on this machine: slurm.sh up [--release 22.05|24.11] | down | status | image
#
# Four hosts: this machine is the login node; `ctl` runs slurmctld, slurmdbd and its database; `node01`
# and `node02` run slurmd. The last three are sets of namespaces (network, mount, PID, UTS, IPC), joined
# by a bridge that lies in ctl's network, so nothing of this machine's network is touched but one
# interface. No service manager, no container engine; needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ci/testbed/lib.sh
. "$here/lib.sh"

bed=$STATE/slurm
run=/run/toolkit-testbed-slurm
link=tbslurm0
tester=tester
memory_cgroup=/sys/fs/cgroup/memory/toolkit-testbed-slurm
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge slurmdbd mariadb-server-core mariadb-client-core iproute2)
clients=(srun sbatch salloc squeue sinfo scontrol scancel sacct sacctmgr sprio sstat)
root_packages=(util-linux bsdextrautils procps hostname python3 jq squashfs-tools squashfuse fuse3 gawk curl parallel zstd pigz)
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
	if [ -n "${TOOLKIT_PYXIS_SO:-}" ]; then
		echo "$TOOLKIT_PYXIS_SO"
		return
	fi
	command -v enroot >/dev/null || return 0
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
	local states
	states=$(timeout 5 "$bed/bin/sinfo" -h -N -p main -o '%T' 2>/dev/null)
	[ "$(wc -l <<<"$states")" = 2 ] && ! grep -qE 'down|drain|fail|inval|unk|reboot|[*]' <<<"$states"
}

healthy() {
	local host
	[ -e "$bed/release" ] || return 1
	for host in login "${hosts[@]}"; do
		alive "$bed/pids/$host" || return 1
	done
	# A busy machine may be late with an answer.
	wait_for 10 slurm_up && wait_for 10 nodes_up
}

# ---- up

check_machine() {
	command -v apt-get >/dev/null || cannot "the Slurm test bed is made of Debian packages, and this machine has no apt-get"
	unshare --mount --net --uts --ipc --pid --fork true 2>/dev/null ||
		cannot "this machine lets root make no namespaces (a container needs --privileged)"
	if [ -e "$run/slurm.state" ] && [ "$(cat "$run/slurm.state")" != "$STATE" ]; then
		die "another test bed is up, with its state in $(cat "$run/slurm.state"); take that one down first"
	fi
	if id "$tester" >/dev/null 2>&1; then
		die "the user '$tester' exists and is not the test bed's; rename or remove it"
	fi
	if [ -n "${TOOLKIT_PYXIS_SO:-}" ] && [ ! -e "$TOOLKIT_PYXIS_SO" ]; then
		die "TOOLKIT_PYXIS_SO names $TOOLKIT_PYXIS_SO, which does not exist"
	fi
}

write_config() {
	local password host
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
	for host in "${hosts[@]}"; do
		{
			echo "# $host"
			echo "127.0.0.1 localhost"
			hosts_lines "$subnet"
		} >"$bed/$host/hosts"
	done
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
		AuthInfo=socket=$run/munge.socket,cred_expire=10
		CredType=cred/munge
		StateSaveLocation=$bed/state
		SlurmdSpoolDir=$bed/spool/%n
		SlurmctldPidFile=$run/slurmctld.pid
		SlurmdPidFile=$run/slurmd.pid
		SlurmctldLogFile=$bed/log/slurmctld.log
		SlurmdLogFile=$bed/log/slurmd.%n.log
		ProctrackType=proctrack/linuxproc
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
		# As on most sites: a job needs an account that its user is in.
		AccountingStorageEnforce=associations
		JobAcctGatherType=jobacct_gather/linux
		JobAcctGatherFrequency=task=1

		GresTypes=gpu
		# More CPUs and memory than this machine may have: what counts here is how Slurm hands them out.
		SlurmdParameters=config_overrides
		NodeName=node01 NodeAddr=$subnet.${octet[node01]} CPUs=8 RealMemory=32000 Gres=gpu:fake:2
		NodeName=node02 NodeAddr=$subnet.${octet[node02]} CPUs=8 RealMemory=32000 Gres=gpu:fake:2
		PartitionName=main Nodes=node01,node02 Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=5
		PartitionName=short Nodes=node01,node02 MaxTime=1 PriorityTier=1
		# What is submitted to 'urgent' takes the nodes from jobs in the others, which are requeued: they
		# get SIGTERM at once, and are killed after GraceTime, rounded up to Slurm's check every 30 s.
		PreemptType=preempt/partition_prio
		PreemptMode=REQUEUE
		PartitionName=urgent Nodes=node01,node02 MaxTime=INFINITE PriorityTier=10
	END
	echo "Name=gpu Type=fake File=$bed/dev/gpu[0-1]" >"$bed/etc/gres.conf"
	configure_memory_limits
	if [ -n "$plugin_dir" ]; then echo "PluginDir=$plugin_dir" >>"$bed/etc/slurm.conf"; fi
	: >"$bed/etc/plugstack.conf"
	if [ -n "$pyxis" ]; then configure_pyxis; fi
}

# A job that takes more memory than it asked for is killed: by the kernel where slurmd can have a memory
# cgroup of its own, as on most clusters, else by slurmd's own polling.
configure_memory_limits() {
	local cgroup=$memory_cgroup
	if [ -w "$(dirname "$cgroup")/cgroup.procs" ] && mkdir -p "$cgroup"/node0{1,2} 2>/dev/null; then
		memory_limit=cgroup
		echo "TaskPlugin=task/cgroup" >>"$bed/etc/slurm.conf"
		cat >"$bed/etc/cgroup.conf" <<-END
			CgroupPlugin=cgroup/v1
			CgroupMountpoint=/sys/fs/cgroup
			ConstrainRAMSpace=yes
		END
	else
		memory_limit=polling
		cat >>"$bed/etc/slurm.conf" <<-END
			TaskPlugin=task/none
			JobAcctGatherParams=OverMemoryKill
		END
	fi
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
		ENROOT_DATA_PATH /run/toolkit-testbed-slurm/local/enroot-data/user-$(id -u)
		ENROOT_CACHE_PATH /run/toolkit-testbed-slurm/local/enroot-cache/user-$(id -u)
	END
}

# The root file system of another release, made once.
make_root() {
	local wanted="${packages[*]} ${root_packages[*]}"
	if [ "$(cat "$1.packages" 2>/dev/null)" != "$wanted" ]; then
		rm -rf "$1"
		make_tree "${suite[$release]}" "$1.part" "${packages[@]}" "${root_packages[@]}"
		mv "$1.part" "$1"
		echo "$wanted" >"$1.packages"
	fi
}

# make_tree SUITE DIRECTORY PACKAGE…: a root file system, from the mirror that this machine uses.
make_tree() {
	local codename=$1 directory=$2 mirror log
	shift 2
	apt_install mmdebstrap
	# shellcheck disable=SC2016  # apt-get fills in the name, not the shell
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)
	say "making a root file system of Debian $codename (once; what comes of it is kept in $CACHE)"
	mkdir -p "$CACHE"
	chmod 755 "$CACHE"
	rm -rf "$directory"
	log=$(mktemp)
	if ! timeout 1200 mmdebstrap --quiet --variant=essential --include="$(IFS=,; echo "$*")" \
		"$codename" "$directory" ${mirror:+"$mirror"} >"$log" 2>&1 9>&-; then
		tail -n 15 "$log" >&2
		rm -rf "$directory" "$log"
		cannot "mmdebstrap could not make a root file system of Debian $codename"
	fi
	rm -f "$log"
}

# A small image for pyxis, Debian with python3, as a squashfs file. Prints its path.
image() {
	local image=$CACHE/debian-python3.sqsh
	if [ ! -e "$image" ]; then
		apt_install squashfs-tools
		make_tree bookworm "$CACHE/image.part" python3
		mksquashfs "$CACHE/image.part" "$image.part" -noappend -quiet -no-progress -comp gzip -e dev >&2
		rm -rf "$CACHE/image.part"
		chmod 644 "$image.part"
		mv "$image.part" "$image"
	fi
	echo "$image"
}

# A program of the other release, run on this machine by that release's own loader and libraries: no
# chroot, so that an ordinary user can run it, in any directory, and find every file where it is.
foreign_program() {
	local root=$1 program=$2 lib
	lib=$(echo "$root"/usr/lib/*-linux-gnu)
	cat >"$bed/bin/${program##*/}" <<-END
		#!/bin/sh
		exec $(echo "$root"/lib*/ld-linux-*.so.?) --argv0 ${program##*/} --library-path $lib/slurm-wlm:$lib $root$program "\$@"
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
	(
		# A memory cgroup of its own, as the root of all that the host sees of cgroups: enroot looks up
		# in /proc/self/cgroup what it then mounts.
		if [ -d "$memory_cgroup/$1" ]; then echo "$BASHPID" >"$memory_cgroup/$1/cgroup.procs"; fi
		exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
			TOOLKIT_TESTBED_STATE="$STATE" TOOLKIT_TESTBED_CACHE="$CACHE" \
			setsid unshare --mount --propagation slave --net --uts --ipc --pid --cgroup --fork --kill-child=KILL -- \
			"$here/slurm-host.sh" "$1" "$2" "$bed" "$3" </dev/null >"$bed/log/$1.log" 2>&1 9>&-
	) &
	wait_for 10 alive "$bed/pids/$1" || die "the host $1 did not start"
}

# until_up WHAT COMMAND…: wait for it, but not for a daemon or a host that has already ended.
until_up() {
	local what=$1 host
	shift
	wait_for 60 settled "$@"
	for host in "${hosts[@]}"; do
		alive "$bed/pids/$host" || die "the host $host ended while it started"
		[ ! -e "$bed/$host/ended" ] || die "on $host, $(cat "$bed/$host/ended")"
	done
	"$@" || die "$what did not come up in time"
}

settled() {
	local host
	for host in "${hosts[@]}"; do
		if [ -e "$bed/$host/ended" ] || ! alive "$bed/pids/$host"; then return 0; fi
	done
	"$@"
}

# What an administrator does once the daemons run.
register() {
	sacctmgr -i add account testbed Description=testbed Organization=testbed >"$bed/log/sacctmgr.log" 2>&1
	sacctmgr -i add user root,"$tester" Account=testbed >>"$bed/log/sacctmgr.log" 2>&1
}

up() {
	local subnet pyxis root=/ plugin_dir='' memory_limit current host tool pid begun=$SECONDS
	if healthy; then
		current=$(cat "$bed/release")
		if [ "${release:-$current}" != "$current" ]; then
			die "Slurm $current is up; run ci/testbed/down slurm first, then ask for $release"
		fi
		say "Slurm $current is up already"
		return
	fi
	if [ -e "$bed" ]; then
		say "found a cluster that is not healthy; removing it first"
		down
	fi
	check_machine
	own=$(own_release)
	release=${release:-$own}
	if [ "$release" != "$own" ] && [ -z "${suite[$release]:-}" ]; then
		die "there is no release '$release' here: ask for ${!suite[*]}, or for this machine's own $own by leaving it out"
	fi
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
	until_up slurmctld slurm_up
	register
	until_up "node01 and node02" nodes_up
	timeout 30 srun -N2 --ntasks-per-node=1 true || die "a first job on both nodes failed"

	echo "$release" >"$bed/release"
	cat >"$STATE/env.slurm" <<-END
		export SLURM_CONF=$SLURM_CONF
		export TOOLKIT_TESTBED_RELEASE=$release
		export TOOLKIT_TESTBED_USER=$tester
		export TOOLKIT_TESTBED_SHARED=$STATE/shared
		export TOOLKIT_TESTBED_PYXIS=$pyxis
		export TOOLKIT_TESTBED_MEMORY_LIMIT=$memory_limit
	END
	# Where the clients of this release are not the machine's own.
	if [ "$root" != / ]; then echo "export PATH=$bed/bin:\$PATH" >>"$STATE/env.slurm"; fi
	trap - EXIT
	say "Slurm $release is up after $((SECONDS - begun)) s: node01 and node02 with 8 CPUs and 2 fake GPUs each; pyxis: ${pyxis:-not installed}"
}

# A half-made cluster is of no use to anyone: say what its logs say, then remove it.
failed() {
	local log
	for log in "$bed"/log/*; do
		if [ -s "$log" ]; then
			printf -- '--- %s\n' "${log##*/}" >&2
			tail -n 5 "$log" >&2
		fi
	done
	down
	say "the cluster did not come up: ${reason:-see the ends of its logs above}"
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
	if [ -d "$memory_cgroup" ]; then
		find "$memory_cgroup" -depth -type d -exec rmdir {} + || say "could not remove $memory_cgroup"
	fi
	rm -rf "$bed" "$STATE/shared" "$STATE/env.slurm" "$run"
	rmdir "$STATE" 2>/dev/null || true
	say "Slurm is down"
}

status() {
	if healthy; then
		say "Slurm $(cat "$bed/release") is up"
		SLURM_CONF=$bed/etc/slurm.conf timeout 10 "$bed/bin/sinfo" -N -p main -o '%N %T %c %G' >&2
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
	[ "$(id -u)" = 0 ] || cannot "the Slurm test bed needs root: it makes network and mount namespaces"
	one_at_a_time slurm
	up
	;;
down)
	one_at_a_time slurm
	down
	;;
status) status ;;
image)
	one_at_a_time slurm
	image
	;;
*)
	echo "usage: slurm.sh up [--release 22.05|24.11] | down | status | image" >&2
	exit 2
	;;
esac
