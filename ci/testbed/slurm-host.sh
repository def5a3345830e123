#!/usr/bin/env bash
# Process 1 of one host of the Slurm test bed: slurm-host.sh NAME ADDRESS BED ROOT
#
# Started by slurm.sh in fresh mount, network, UTS, IPC and PID namespaces. It makes the host its own
# (/proc, /run, /dev/shm, /etc/hosts, name, address), starts the daemons of its role and then only
# reaps. Ending it ends everything on the host, user processes included, and nothing is left mounted.
set -euo pipefail
name=$1 address=$2 bed=$3 root=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ci/testbed/lib.sh
. "$here/lib.sh"

# Outside, this process has another id. /proc is still the outer one, and `read` is no process of
# its own, so /proc/self names this shell as slurm.sh sees it.
read -r outer _ </proc/self/stat
record_pid "$bed/pids/$name" "$outer"

resolv_path=$(readlink -m /etc/resolv.conf)
resolv=$(cat "$resolv_path" 2>/dev/null || true)

if [ "$root" != / ]; then
	# Another release: its root file system, with everything of this machine that is not the
	# distribution's own (homes, checkouts, /usr/local, scratch) at the same paths.
	mount --bind "$root" "$root"
	for path in /* /usr/local /var/tmp; do
		case $path in
		/bin | /boot | /etc | /lib* | /lost+found | /proc | /run | /sbin | /usr | /var) continue ;;
		esac
		if [ -d "$path" ] && [ ! -L "$path" ]; then
			mkdir -p "$root$path"
			mount --rbind "$path" "$root$path"
		fi
	done
	# Not recursive: they hold the root file system itself.
	for path in "$STATE" "$CACHE"; do
		mkdir -p "$root$path"
		mount --bind "$path" "$root$path"
	done
	# Where they are installed with the distribution's own files: enroot, and the interpreter behind a
	# virtual environment. One that was built for an older glibc runs on a newer one, not the reverse.
	for path in /usr/bin/enroot* /usr/lib/enroot /usr/share/enroot /etc/enroot /usr/{bin,lib}/python3.*; do
		# Not over the release's own; an empty file or folder is the mount point of an earlier `up`.
		if [ -n "$(find "$root$path" -type f -size +0c -print -quit 2>/dev/null)" ]; then continue; fi
		if [ -d "$path" ]; then mkdir -p "$root$path"; elif [ -e "$path" ]; then touch "$root$path"; else continue; fi
		mount --bind "$path" "$root$path"
	done
	# A copy: useradd replaces the file, and a bind mount would keep showing the old one.
	for file in passwd group; do
		mount --bind "$bed/etc/$file" "$root/etc/$file"
	done
	mkdir -p "$root/.outside"
	cd "$root"
	# A plain chroot would not do: inside one the kernel refuses user namespaces, which enroot needs.
	pivot_root . .outside
	cd /
fi

mount -t proc proc /proc
if [ "$root" != / ]; then umount -l /.outside; fi
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir -p /run/lock /run/toolkit-testbed-slurm "$(dirname "$resolv_path")"
printf '%s\n' "$resolv" >"$bed/$name/resolv.conf"
[ -e "$resolv_path" ] || touch "$resolv_path"
mount --bind "$bed/$name/resolv.conf" "$resolv_path"
mount --bind "$bed/$name/hosts" /etc/hosts
printf '%s\n' "$name" >"$bed/$name/hostname"
[ -e /etc/hostname ] || touch /etc/hostname
mount --bind "$bed/$name/hostname" /etc/hostname
hostname "$name"
# As udev has it on a real machine: squashfuse is for everyone.
if [ -e "$bed/dev/fuse" ] && [ -e /dev/fuse ]; then mount --bind "$bed/dev/fuse" /dev/fuse; fi

if [ -e "$bed/etc/cgroup.conf" ] && [ "$name" != ctl ]; then
	umount /sys/fs/cgroup/memory
	mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory
fi
if [ -e "$bed/etc/enroot.sysconf" ] && [ "$name" != ctl ]; then
	mkdir -m 1777 /run/enroot
	mkdir -p /run/toolkit-testbed-slurm/local
	mount --bind "$bed/$name/local" /run/toolkit-testbed-slurm/local
	mount --bind "$bed/etc/enroot.conf.d" "$(cat "$bed/etc/enroot.sysconf")/enroot.conf.d"
fi

ip link set lo up
if [ "$name" = ctl ]; then
	ip link add eth0 type bridge
	for port in login node01 node02; do
		wait_for 20 ip link show "$port"
		ip link set "$port" master eth0 up
	done
fi
wait_for 20 ip link show eth0
ip addr add "$address/24" dev eth0
ip link set eth0 up

export SLURM_CONF=$bed/etc/slurm.conf
# daemon NAME ARG…: run it in the foreground, as a child of this shell; should it end, slurm.sh can tell.
daemon() {
	{
		"$@" >"$bed/log/$1.$name.out" 2>&1 && true
		echo "$1 ended with exit code $?" >"$bed/$name/ended"
	} &
}

"$here/slurm-munged.sh" "$bed" "$name"
if [ "$name" = ctl ]; then
	mariadb-install-db --no-defaults --user=root --datadir="$bed/db" --skip-test-db --skip-name-resolve \
		--auth-root-authentication-method=normal >"$bed/log/mariadb-install.log" 2>&1
	daemon mariadbd --no-defaults --user=root --datadir="$bed/db" --bind-address=127.0.0.1 \
		--socket=/run/toolkit-testbed-slurm/mariadb.sock --pid-file=/run/toolkit-testbed-slurm/mariadb.pid \
		--init-file="$bed/etc/init.sql" --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0
	wait_for 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/3306'
	daemon slurmdbd -D
	wait_for 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/6819'
	daemon slurmctld -D
else
	daemon slurmd -D -N "$name"
fi

# Bash reaps what is orphaned on this host while it waits.
while :; do
	sleep 3600 &
	wait "$!" || true
done
