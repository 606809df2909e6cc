"""The state of a worker's own optimizer, from one worker group to another."""
