#!/usr/bin/env bash
# What `toolkit doctor` asks of a machine: bash -c THIS bash READ_ENROOT_SETTINGS, here or on a compute
# node. Prints NAME<tab>VALUE lines; every question has a limit, and one that fails prints nothing.
say() { printf '%s\t%s\n' "$1" "$2"; }
ask() {
	local name=$1 value
	shift
	value=$(timeout 10 "$@" 2>/dev/null </dev/null) || return 0
	while read -r line; do say "$name" "$line"; done <<<"$value"
}
# Type, free bytes and identity of the file system that holds, or would hold, a path.
where() {
	local name=$1 path=$2
	while [ ! -e "$path" ] && [ "$path" != / ]; do path=$(dirname "$path"); done
	ask "fs.$name" stat -f -c '%T %a %S' "$path"
	ask "inode.$name" stat -c '%i' "$path"
}
say host "$(uname -n)"
say uid "$(id -u)"
say arch "$(uname -m)"
for program in enroot unsquashfs mksquashfs squashfuse parallel jq zstd scontrol nvidia-container-cli nvidia-smi python3; do
	say "path.$program" "$(command -v "$program")"
done
ask namespaces unshare --user --map-root-user --mount echo yes
for key in user/max_user_namespaces kernel/unprivileged_userns_clone kernel/apparmor_restrict_unprivileged_userns; do
	if [ -r "/proc/sys/$key" ]; then say "sysctl.$key" "$(cat "/proc/sys/$key")"; fi
done
where cwd "$PWD"
where home "$HOME"
for interface in /sys/class/net/*; do
	if [ "$(cat "$interface/operstate" 2>/dev/null)" != down ]; then say interface "${interface##*/}"; fi
done
for device in /sys/class/infiniband/*; do
	if [ -e "$device" ]; then say infiniband "${device##*/}"; fi
done
ask gpu nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
say cuda "$(timeout 10 nvidia-smi 2>/dev/null </dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p')"
if enroot=$(command -v enroot); then
	ask enroot.version enroot version
	sysconf=$(sed -n 's|^config::init "\(.*\)/enroot.conf"$|\1|p' "$enroot")
	while IFS='=' read -r -d '' key value; do
		case $key in
		ENROOT_*_PATH)
			say "$key" "$value"
			where "$key" "$value"
			;;
		ENROOT_*) say "$key" "$value" ;;
		esac
	done < <(timeout 10 bash -c "$1" bash "${sysconf:-/etc/enroot}" 2>/dev/null)
	for hook in "${sysconf:-/etc/enroot}"/hooks.d/*.sh "${ENROOT_CONFIG_PATH:-$HOME/.config/enroot}"/hooks.d/*.sh; do
		if [ -x "$hook" ]; then say hook "${hook##*/}"; fi
	done
fi
true
