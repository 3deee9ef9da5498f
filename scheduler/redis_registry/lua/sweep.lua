-- Ends what has run out, which the prelude did. Returns the id of the log's last record.
return {'ok', int(sequence)}
