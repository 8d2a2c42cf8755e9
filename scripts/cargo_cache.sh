# Sourced: lets every checkout of a user share compiled crates, as uv lets them share packages. What is linked stays in target/.
# Cargo older than 1.91 does not know the setting and compiles into target/ as ever.
if [ -n "${XDG_CACHE_HOME:-${HOME:-}}" ]; then
  export CARGO_BUILD_BUILD_DIR="${CARGO_BUILD_BUILD_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvloft/cargo}"
fi
