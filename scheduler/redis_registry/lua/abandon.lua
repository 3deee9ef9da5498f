-- ARGV: [5] id of a transfer that was reserved without an answer, [6] the replica that was asked.
-- Ends the transfer unless another replica was asked for it, too.
local id, replica = ARGV[5], ARGV[6]

if transfer_of(id) and redis.call('HGET', ASKED, id) == replica then
  end_transfer(id, 'expired')
end
return {'ok'}
