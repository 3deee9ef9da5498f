-- The prelude has ended a portion of what has expired. Returns the id of the log's last record, and
-- 'more' if more may have expired.
return {'ok', int(sequence), backlog and 'more' or ''}
