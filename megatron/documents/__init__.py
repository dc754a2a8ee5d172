"""Files that users write and read, for all rooms: read with errors of one sentence, written in whole or not at all.
And numbers in such sentences."""
