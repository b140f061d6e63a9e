#!/bin/sh
# Runs the command as the owner of the model cache, so that a cache mounted as the recipes print it
# (-v ~/.cache:/root/.cache:rw) can be written and what is fetched belongs to whoever mounted it.
# Without a mount, as user 1000. A user given to the container (--user, runAsUser) stays as it is.
set -eu

if [ "$(id -u)" != 0 ]; then
    exec "$@"
fi
for cache in "${HF_HUB_CACHE:-}" "${HF_HOME:-}" "$HOME/.cache/huggingface" "$HOME/.cache"; do
    [ ! -d "$cache" ] || break
done
uid=$(stat -c %u "$cache")
if [ "$uid" = 0 ]; then
    echo "entrypoint: $cache belongs to root, so root runs this; another user: --user UID:GID" >&2
    exec "$@"
fi
exec setpriv --reuid "$uid" --regid "$(stat -c %g "$cache")" --clear-groups "$@"
