-- ARGV: [4] id of the transfer.
if redis.call('HEXISTS', TRANSFERS, ARGV[4]) == 0 then
  return {'unknown-transfer'}
end
end_transfer(ARGV[4], 'released')
return {'ok'}
