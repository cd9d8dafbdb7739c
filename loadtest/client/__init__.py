"""The load tester: sessions, the clients that send them, and what they note."""
