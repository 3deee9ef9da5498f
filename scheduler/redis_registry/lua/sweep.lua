-- Ends a portion of what has run out, which the prelude did. Returns the id of the log's last
-- record, and whether more may have run out.
return {'ok', int(sequence), backlog and 'more' or ''}
