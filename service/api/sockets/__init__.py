"""WebSockets: what all of them do alike, and those of completions and chat."""
