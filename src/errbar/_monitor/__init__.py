"""Streams: alarms with a stated false-alarm rate."""
