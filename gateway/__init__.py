"""The process that is always on: doors, admission, supervision. It never touches a sample of audio."""
