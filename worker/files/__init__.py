"""Files, from the spool to segments of speech (``reader``, ``segments``) and from finals to events (``file_job``)."""
