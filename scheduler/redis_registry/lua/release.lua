-- ARGV: [5] id of the transfer.
if not transfer_of(ARGV[5]) then
  return {'unknown-transfer'}
end
end_transfer(ARGV[5], 'released')
return {'ok'}
