#!/usr/bin/env bash
# ci/testbed/up, down and status: pass the verb on to the parts, and keep ci/testbed/env.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ci/testbed/lib.sh
. "$here/lib.sh"

verb=$1
shift
part=all
case "${1:-}" in
slurm | docker | all)
	part=$1
	shift
	;;
-h | --help | [!-]*)
	echo "usage: ci/testbed/$verb [slurm|docker|all]$([ "$verb" = up ] && echo ' [--release 22.05|24.11]')" >&2
	exit 2
	;;
esac
parts=("$part")
if [ "$part" = all ]; then parts=(slurm docker); fi

# ci/testbed/env: what each part that is up says of itself, as a file to source.
write_env() {
	local pieces
	pieces=$(cat "$STATE"/env.* 2>/dev/null || true)
	if [ -n "$pieces" ]; then
		printf '%s\n' "$pieces" >"$here/env"
	else
		rm -f "$here/env"
	fi
}

code=0
for part in "${parts[@]}"; do
	args=("$@")
	# --release is a matter of Slurm alone.
	if [ "$part" = docker ]; then args=(); fi
	"$here/$part.sh" "$verb" "${args[@]}" || code=$?
	# A refused `up` has changed nothing, and a failed one has cleaned up after itself.
	if [ "$verb" = up ] && [ "$code" -ne 0 ]; then exit "$code"; fi
	if [ "$verb" != status ]; then write_env; fi
done
exit "$code"
