"""Audio: keyword spotting, speech recognition, voice activity."""
