"""The user's side: sessions, sampling and SwarmClient."""
